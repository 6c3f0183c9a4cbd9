"""The whole path against the dense Fisher of small models, where K-FAC's approximations are exact.

The oracle knows nothing of graphs, rows or factors: it differentiates the loss of one case at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

import kfac_fx
from kfac_fx import losses
from kfac_fx.fisher.block import BlockOperator
from kfac_fx.linalg.vectors import split
from tests.models import ZOO, Case
from tests.tables import every
from tests.whole.generated import Recipe, recipes

pytestmark = pytest.mark.usefixtures("float64")

Gradients = Mapping[str, Tensor]
KINDS = {
    "categorical": losses.Categorical,
    "normal": losses.Normal,
    "multi_bernoulli": losses.MultiBernoulli,
}


def gradients_by_case(
    model: nn.Module, kind: str, args: tuple[Tensor, ...], targets: Tensor
) -> list[dict[str, Tensor]]:
    """The gradient of each case's own loss, from a forward of that case alone."""
    found = []
    for n in range(len(targets)):
        model.zero_grad()
        output = model(*(arg[n : n + 1] for arg in args))
        KINDS[kind](output, targets=targets[n : n + 1]).evaluate().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    return found


def dense_block(block: BlockOperator, gradients: list[dict[str, Tensor]], cases: int) -> Tensor:
    """Σ_n g_n g_nᵀ / cases over the block's matrix, flattened."""
    assert block.registration.matrix is not None
    packed = [block.registration.matrix.pack(split(gradient, [block.registration])) for gradient in gradients]
    flat = torch.stack([matrix.flatten() for matrix in packed])
    return flat.mT @ flat / cases


def estimated(
    model: nn.Module, kind: str, args: tuple[Any, ...], targets: Tensor, **options: Any
) -> kfac_fx.FisherEstimator:
    net = kfac_fx.compile(model, args, loss=kind, **options)
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="empirical")
    estimator.update_covariances(*args, targets=targets)
    return estimator


SEPARATE_CASES = (  # one case's output depends on that case alone, and the first dimension counts the cases
    "mlp", "shared_module", "shared_functional", "tied_autoencoder", "aliases", "shared_bias", "two_biases", "residual",
    "conv_options", "conv1d", "conv3d", "depthwise", "separable", "tables", "gpt", "gpt_tied",
    "encoder_by_hand", "elementwise", "recurrent", "rare", "class_token", "tokens",
    "relative_positions", "relative_positions_embedded", "relative_positions_in_fused_attention", "relative_queries",
    "other_sizes", "lstm", "cells", "biases_in_pieces", "weight_of_two", "slices", "multiples", "gates",
)  # fmt: skip
IN_PART = (  # the same, and some of the blocks that are asked to be diagonal are Kronecker products
    "spellings", "rare_products", "batched", "siamese", "alias_once", "pyramid", "burgers", "adversarial",
    "gates_of_heads", "cross_attention", "attention_of_other_widths", "biases_of_several", "standardized_by_hand",
    "weight_norm", "discriminator", "adaptive_rank", "differential", "blended", "trained_tokens", "token_with_position",
    "table_made_by_a_network", "disentangled", "projection_of_a_table", "rnn_learned_start", "encoder_decoder",
    "recurrent_from_zero", "frozen", "unused", "generic", "prototypes", "evaluated", "wave_function", "hypernetwork",
    "step_by_step", "language", "vision",
)  # fmt: skip


def prepared(case: Case) -> tuple[nn.Module, tuple[Any, ...], Tensor]:
    torch.manual_seed(0)
    model, args = case.make().double(), case.inputs()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        output = model(*args)
    loss = KINDS[case.loss](output)
    return model, args, loss.sample(torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", every(2, SEPARATE_CASES))
def test_full_blocks_are_the_dense_fisher(name: str) -> None:
    """Gradients of one case summed over all uses and positions, whatever the layer."""
    case = ZOO[name]
    model, args, targets = prepared(case)
    estimator = estimated(model, case.loss, args, targets, approximations={"*": "full"}, dense_limit=10_000)
    oracle = gradients_by_case(model, case.loss, args, targets)
    cases = KINDS[case.loss](model(*args)).cases
    for block in estimator.blocks.values():
        if not block.registration.generic:
            torch.testing.assert_close(block.full_fisher_block(), dense_block(block, oracle, cases))


class OfSizes(nn.Module):
    """A function of the input, its sizes and parameters, before a layer."""

    def __init__(self, function: Callable[..., Tensor], features: int, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.held = function, nn.ParameterDict({n: torch.randn(s) for n, s in shapes.items()})
        self.last = nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.function(x, **self.held)).mean(1))  # type: ignore[no-any-return]


OF_SIZES: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    "the last size": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), {"w": (6,), "b": (6,)}),
    "a list": (lambda x, w: F.layer_norm(x, [x.size(-1)], w), {"w": (6,)}),
    "two sizes": (lambda x, w, b: F.layer_norm(x, x.shape[-2:], w, b), {"w": (4, 6), "b": (4, 6)}),
    "permuted": (
        lambda x, w, b: F.layer_norm(x.mT, (x.size(1),), w, b).mT, {"w": (4,), "b": (4,)}
    ),
    "root mean square": (lambda x, w: F.rms_norm(x, (x.size(-1),), w), {"w": (6,)}),
    "groups": (lambda x, w, b: F.group_norm(x, x.shape[1], w, b), {"w": (4,), "b": (4,)}),
}  # fmt: skip


@pytest.mark.parametrize("inputs", [True, False], ids=["exported", "symbolic"])
@pytest.mark.parametrize("name", OF_SIZES)
def test_norms_over_sizes_of_the_models_input(name: str, inputs: bool) -> None:
    """In a capture these sizes may be symbols, or be computed; the shape of the gain is known."""
    torch.manual_seed(0)
    function, shapes = OF_SIZES[name]
    model, x = OfSizes(function, 6, **shapes), torch.randn(5, 4, 6)
    targets = torch.randint(3, (5,))
    net = kfac_fx.compile(model, (x,) if inputs else None, loss="categorical", approximations={"*": "full"})
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="empirical")
    estimator.update_covariances(x, targets=targets)
    assert not any(registration.generic for registration in net.registrations)
    oracle = gradients_by_case(model, "categorical", (x,), targets)
    for block in estimator.blocks.values():
        torch.testing.assert_close(block.full_fisher_block(), dense_block(block, oracle, 5))
    more = torch.randn(7, 4, 6)
    assert torch.equal(net(more), model(more))


FIXED_SIZES: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    "a view of a scale": (lambda x, w: x * w.view(1, 1, x.size(2)), {"w": (6,)}),
    "a view of a weight": (lambda x, w: x @ w.view(x.size(2), 6), {"w": (36,)}),
    "slices": (lambda x, w: x * w[: x.size(2)], {"w": (9,)}),
}


@pytest.mark.parametrize("name", FIXED_SIZES)
def test_parameters_that_are_viewed_by_sizes_of_the_models_input(name: str) -> None:
    torch.manual_seed(0)
    function, shapes = FIXED_SIZES[name]
    model, x = OfSizes(function, 6, **shapes), torch.randn(5, 4, 6)
    targets = torch.randint(3, (5,))
    estimator = estimated(model, "categorical", (x,), targets, approximations={"*": "full"})
    assert not any(registration.generic for registration in estimator.net.registrations)
    oracle = gradients_by_case(model, "categorical", (x,), targets)
    for block in estimator.blocks.values():
        torch.testing.assert_close(block.full_fisher_block(), dense_block(block, oracle, 5))
    for more in (torch.randn(7, 4, 6), torch.randn(7, 2, 6)):
        assert torch.equal(estimator.net(more), model(more))


@pytest.mark.parametrize("name", every(4, SEPARATE_CASES + IN_PART, first=1))
def test_diagonal_blocks_are_the_diagonal_of_the_dense_fisher(name: str) -> None:
    case = ZOO[name]
    check_diagonal_blocks(*prepared(case), case.loss, in_part=name in IN_PART)


def check_diagonal_blocks(
    model: nn.Module, args: tuple[Any, ...], targets: Tensor, kind: str, in_part: bool = False
) -> None:
    """in_part: whether some blocks are no diagonal ones, as those of layers whose positions count as cases."""
    estimator = estimated(model, kind, args, targets, approximations={"*": "diagonal"})
    oracle = gradients_by_case(model, kind, args, targets)
    cases = KINDS[kind](model(*args)).cases
    blocks = [block for block in estimator.blocks.values() if not block.registration.generic]
    diagonal = [block for block in blocks if block.registration.approximation == "diagonal"]
    assert diagonal if in_part else diagonal == blocks
    for block in diagonal:
        found = block.full_fisher_block().diagonal()
        torch.testing.assert_close(found, dense_block(block, oracle, cases).diagonal())


def repeatable(recipe: Recipe) -> bool:
    return not any(f"'{op}'" in str(recipe) for op in ("noise", "mask"))


@settings(max_examples=10)
@given(recipes().filter(repeatable))
def test_diagonal_blocks_of_generated_models_are_the_diagonal_of_the_dense_fisher(recipe: Recipe) -> None:
    model = recipe.model().double().eval()  # where batch norms keep cases apart
    x = recipe.inputs().double()
    torch.manual_seed(0)
    check_diagonal_blocks(model, (x,), torch.randn_like(model(x)), "normal", in_part=True)


def test_one_case_without_weight_sharing_is_exact() -> None:
    """E[a aᵀ] ⊗ E[g gᵀ] = E[(a ⊗ g)(a ⊗ g)ᵀ] where the expectation is over one case (Martens & Grosse 2015, §3)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(1, 3), torch.tensor([2])
    estimator = estimated(model, "categorical", (x,), y)
    oracle = gradients_by_case(model, "categorical", (x,), y)
    for block in estimator.blocks.values():
        assert block.registration.approximation == "kron"
        torch.testing.assert_close(block.full_fisher_block(), dense_block(block, oracle, 1))


def test_deep_linear_networks_with_squared_error_are_exact() -> None:
    """Output gradients do not depend on the inputs there (Bernacchia et al. 2018), so A and G are independent; the mean
    over sampled targets is held to five of its own standard errors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 3)).double()
    x = torch.randn(6, 3)
    net = kfac_fx.compile(model, (x,), loss="normal")
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3)
    generator = torch.Generator().manual_seed(0)
    rounds = 400
    samples: dict[tuple[str, ...], list[Tensor]] = {key: [] for key in estimator.blocks}
    for _ in range(rounds):
        moments = net.record((x,), {}, generator=generator)
        estimator.accumulate(moments)
        estimator.fold(decay=1.0)
        for key, statistics in moments.statistics.items():
            samples[key].append(statistics["G"] / statistics["count"])
    jacobians = case_jacobians(model, x)
    for key, block in estimator.blocks.items():
        assert block.registration.matrix is not None
        exact = torch.stack([jacobian_fisher(block, jacobian) for jacobian in jacobians]).mean(0)
        g = torch.stack(samples[key])
        error = g.std(0).norm() / rounds**0.5 * block.factors["A"].value.norm()
        assert (block.full_fisher_block() - exact).norm() < 5 * error
        assert error < 0.1 * exact.norm()  # the bound means something


class DeepLinear(nn.Module):
    """Layers that positions share, the mean or a multiple of the sum over the real positions, and one layer more."""

    def __init__(self, first: nn.Module, mean: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = first, nn.Linear(4, 2), nn.Linear(2, 3)
        self.mean = mean

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x.mT).mT if isinstance(self.first, nn.Conv1d) else self.first(x)
        x = self.second(x)
        real = x.new_ones(x.shape[:2]) if mask is None else mask
        pooled = (x * real.unsqueeze(-1)).sum(1)
        out: Tensor = self.head(pooled / real.sum(1, keepdim=True) if self.mean else 0.3 * pooled)
        return out


FIRST: dict[str, Callable[[], nn.Module]] = {"linear": lambda: nn.Linear(3, 4), "conv": lambda: nn.Conv1d(3, 4, 2)}


@pytest.mark.parametrize(
    ("first", "pooled"),
    [("linear", "mean"), ("linear", "sum"), ("linear", "mean of other lengths"), ("conv", "mean"), ("conv", "sum")],
)
def test_reduce_is_exact_for_deep_linear_networks_that_end_over_positions(first: str, pooled: str) -> None:
    """Gradients are the same at all positions there, and do not depend on the inputs (Eschenhagen et al. 2023)."""
    torch.manual_seed(0)
    model, x = DeepLinear(FIRST[first](), pooled != "sum").double(), torch.randn(6, 5, 3)
    args, options = (x,), {}
    if pooled == "mean of other lengths":
        lengths = torch.tensor([5, 2, 1, 4, 3, 2])
        args, options = (x, (torch.arange(5) < lengths.unsqueeze(-1)).double()), {"padding_mask": "mask"}
    jacobians = case_jacobians(model, *args)
    for approximation in ("kron_reduce", "kron"):
        net = kfac_fx.compile(model, args, loss="normal", approximations={"*": approximation}, **options)
        estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
        estimator.update_covariances(*args)
        for block in estimator.blocks.values():
            exact = torch.stack([jacobian_fisher(block, jacobian) for jacobian in jacobians]).mean(0)
            error = (block.full_fisher_block() - exact).norm() / exact.norm()
            shared = not block.registration.parameters[0].startswith("head")
            assert error < 1e-12 if approximation == "kron_reduce" or not shared else error > 0.1


def case_jacobians(model: nn.Module, *args: Tensor) -> list[list[dict[str, Tensor]]]:
    """For each case, the gradient of each of its outputs."""
    found = []
    for n in range(len(args[0])):
        alone = [arg[n : n + 1] for arg in args]
        rows = []
        for k in range(model(*alone).shape[1]):
            model.zero_grad()
            model(*alone)[0, k].backward()
            rows.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        found.append(rows)
    return found


def jacobian_fisher(block: BlockOperator, rows: list[dict[str, Tensor]]) -> Tensor:
    """Jᵀ F_out J of one case; the Fisher of a normal with variance ½ is 2 I."""
    assert block.registration.matrix is not None
    flat = torch.stack([block.registration.matrix.pack(row).flatten() for row in rows])
    return 2 * flat.mT @ flat
