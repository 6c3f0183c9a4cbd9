"""`kron_reduce`: from real layers to blocks, against the definition on the inputs and gradients that hooks see."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import FisherEstimator, LayerCollection
from kfac_fx.fisher.block import BlockOperator
from tests.runtime.collections_of_toys import collection

pytestmark = pytest.mark.usefixtures("float64")

REDUCE = {"*": "kron_reduce"}


class Pooled(nn.Module):
    """One layer, with channels last or, of a convolution, first; then something that no layer is, and a sum."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        y = y.movedim(1, -1) if isinstance(self.layer, nn.Conv1d | nn.Conv2d) else y
        return y.flatten(1, -2).sum(1) if y.dim() > 2 else y


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """[g, S, i] of one case."""
    if isinstance(layer, nn.Linear):
        return x.flatten(0, -2).unsqueeze(0)
    assert isinstance(layer, nn.Conv2d)
    columns = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)[0]  # type: ignore[arg-type]
    return columns.unflatten(0, (layer.groups, -1)).mT


def gradients(layer: nn.Module, d: Tensor) -> Tensor:
    """[g, S, o] of one case."""
    if isinstance(layer, nn.Linear):
        return d.flatten(0, -2).unsqueeze(0)
    return d[0].flatten(1).unflatten(0, (layer.groups, -1)).mT  # type: ignore[arg-type]


Pairs = list[tuple[Tensor, Tensor]]  # mean rows [g, i] and summed gradient rows [g, o]


def pairs_of(model: nn.Module, layer: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Pairs:
    """Gradient rows of every use in every case, with the true labels: case after case, hook after hook."""
    found: Pairs = []

    def forward(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        x = patches(layer, inputs[0].detach())
        mean = torch.cat([x, x.new_ones(*x.shape[:2], int(layer.bias is not None))], -1).mean(1)
        output.register_hook(lambda d: found.append((mean, gradients(layer, d).sum(1))))

    hook = layer.register_forward_hook(forward)  # type: ignore[arg-type]
    for n in range(len(y)):
        F.cross_entropy(model(*(arg[n : n + 1] for arg in args)), y[n : n + 1]).backward()
    hook.remove()
    model.zero_grad()
    return found


def block_from(pairs: Pairs, cases: int) -> Tensor:
    """c G ⊗ A, group by group."""
    sides = [torch.stack(side) for side in zip(*pairs, strict=True)]
    a, g = (torch.einsum("ngi,ngj->gij", side, side) / len(pairs) for side in sides)
    return torch.block_diag(*(len(pairs) / cases * torch.kron(*both) for both in zip(g, a, strict=True)))


def oracle(model: nn.Module, layer: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return block_from(pairs_of(model, layer, args, y), len(y))


def estimated(model: Any, args: tuple[Any, ...], y: Tensor | None, **options: Any) -> FisherEstimator:
    options = {"loss": "categorical", "approximations": REDUCE, "strict": True, **options}
    estimator = FisherEstimator(
        model if isinstance(model, LayerCollection) else kfac_fx.compile(model, args, **options),
        damping=1e-3,
        estimation_mode="exact" if y is None else "empirical",
    )
    estimator.update_covariances(*args, targets=y)
    return estimator


def block_of(estimator: FisherEstimator, name: str) -> BlockOperator:
    (block,) = (
        block
        for key, block in estimator.blocks.items()
        if any(parameter_name.startswith(name) for parameter_name in key)
    )
    return block


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vectors": (lambda: nn.Linear(3, 4), (3,)),
    "sequences": (lambda: nn.Linear(3, 4), (5, 3)),
    "images, channels last": (lambda: nn.Linear(3, 4, bias=False), (5, 2, 3)),
    "convolution": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), (2, 5, 6)),
    "grouped convolution": (lambda: nn.Conv2d(4, 4, (2, 1), dilation=2, groups=2, bias=False), (4, 5, 5)),
    "depthwise convolution": (lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 5, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_has_one_mean_and_one_sum_a_case(name: str) -> None:
    make, shape = LAYERS[name]
    model, x, y = Pooled(make()), torch.randn(6, *shape), torch.randint(4, (6,))
    block = block_of(estimated(model, (x,), y), "layer")
    assert block.registration.approximation == "kron_reduce" and block.registration.reason is None
    assert block.factors["positions"].value == 1
    torch.testing.assert_close(block.full_fisher_block(), oracle(model, model.layer, (x,), y))
    whole = block_of(estimated(model, (x,), y, approximations={}), "layer").full_fisher_block()
    assert (name == "vectors") == torch.allclose(whole, block.full_fisher_block())


class Twice(nn.Module):
    """One layer at five positions, and again at two."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        y = torch.tanh(self.layer(torch.stack([y[:, :3].sum(1), y[:, 3:].sum(1)], 1)))
        return self.head(y.mean(1))


def test_several_uses_are_independent_and_c_is_their_number() -> None:
    model, x, y = Twice(), torch.randn(6, 5, 3), torch.randint(4, (6,))
    estimator = estimated(model, (x,), y)
    block = block_of(estimator, "layer")
    assert block.factors["positions"].value == 2
    torch.testing.assert_close(block.full_fisher_block(), oracle(model, model.layer, (x,), y))
    described = [row["block"] for row in estimator.net.report.to_dict()["registrations"]]
    assert "kronecker, independent, reduced" in described


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.weight.mT) @ self.weight).sum(1)


def test_in_a_transposed_use_the_gradients_are_averaged_and_the_inputs_summed() -> None:
    model, x, y = Tied(), torch.randn(6, 5, 3), torch.randint(3, (6,))
    block = block_of(estimated(model, (x,), y), "weight")
    assert [use.transposed for use in block.registration.uses] == [False, True]
    hidden = torch.tanh(x @ model.weight.detach().mT)
    d = torch.softmax((hidden @ model.weight.detach()).sum(1), -1) - F.one_hot(y, 3)
    back = (d @ model.weight.detach().mT).unsqueeze(1) * (1 - hidden.square())
    a = torch.cat([x.mean(1), d])  # the gradient is d at every position
    g = torch.cat([back.sum(1), hidden.sum(1)])
    expected = 2 * torch.kron(g.mT @ g / 12, a.mT @ a / 12)
    torch.testing.assert_close(block.full_fisher_block(), expected)


# --- padding --------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x))) * mask.unsqueeze(-1)
        return self.head(y.sum(1) / mask.sum(1, keepdim=True))


def test_padding_is_in_no_mean_and_in_no_sum() -> None:
    """The blocks are those of every sequence on its own, without its padding."""
    lengths, y = (3, 5, 1), torch.randint(4, (3,))
    mask = (torch.arange(5) < torch.tensor(lengths).unsqueeze(-1)).double()
    x, model = torch.randn(3, 5, 3), Masked()
    estimator = estimated(model, (x, mask), y, padding_mask="mask")
    again = estimated(model, (torch.where(mask.unsqueeze(-1) == 1, x, 100.0), mask), y, padding_mask="mask")
    for name in ("first", "second"):
        alone = [
            pair
            for n, length in enumerate(lengths)
            for pair in pairs_of(
                model, getattr(model, name), (x[n : n + 1, :length], mask[n : n + 1, :length]), y[n:][:1]
            )
        ]
        for estimate in (estimator, again):
            torch.testing.assert_close(block_of(estimate, name).full_fisher_block(), block_from(alone, 3))


# --- what has no positions of a case ----------------------------------------------------------------------------------


def fallback(model: nn.Module, *args: Any, name: str = "layer", **options: Any) -> tuple[str, str]:
    options = {"loss": "categorical", "approximations": REDUCE, **options}
    net = kfac_fx.compile(model, args, **options)
    (one,) = (
        registration for registration in net.registrations if any(p.startswith(name) for p in registration.parameters)
    )
    return one.approximation, re.sub(r" \(\S+\)", "", one.reason or "")


class Merged(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).view(*x.shape[:2], -1).sum(1)  # type: ignore[no-any-return]


class Learned(nn.Module):
    """A projection of learned positions, the same for all cases."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.layer = nn.Parameter(torch.randn(5, 3)), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.layer(self.places)) * x).sum(1)


class Words(nn.Module):
    """A table, and the same table transposed as the output layer."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.layer, self.tied = nn.Embedding(7, 4), tied

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.layer(ids)).mean(1)
        return x @ self.layer.weight.mT if self.tied else x


IDS = torch.randint(7, (6, 5))


@pytest.mark.parametrize(
    ("make", "args", "expected"),
    [
        (
            lambda: Merged(nn.Linear(3, 4)),
            (torch.randn(6, 5, 3).double(),),
            ("kron", "forward merges its cases with positions, as x.flatten(0, 1) does, so not 'kron_reduce'"),
        ),
        (
            Learned,
            (torch.randn(6, 5, 4).double(),),
            ("kron", "its gradient is summed over cases at its output, so not 'kron_reduce'"),
        ),
        (
            lambda: Words(False),
            (IDS,),
            ("kron_in_diag", "its rows at embedding are ids, or are routed to experts, so not 'kron_reduce'"),
        ),
        (
            lambda: Words(True),
            (IDS,),
            ("kron_in_diag", "its rows at embedding are ids, or are routed to experts, so not 'kron_reduce'"),
        ),
    ],
    ids=["merged cases", "independent of the batch", "ids", "ids and a transposed use"],
)
def test_without_positions_of_a_case_the_block_is_the_layers_own_product(
    make: Callable[[], nn.Module], args: tuple[Any, ...], expected: tuple[str, str]
) -> None:
    approximation, reason = fallback(make(), *args)
    assert (approximation, reason.split("; ")[-1]) == expected


def test_ids_of_a_declared_layer_are_seen_by_the_proof() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Parameter(torch.randn(5, 3))

        def forward(self, ids: Tensor) -> Tensor:
            return torch.gather(self.fc, 0, ids.expand(-1, 3))

    @kfac_fx.layer(
        rows=lambda ids, attrs: ids,
        grad_rows=lambda d, attrs: d.unsqueeze(1),
        layouts={"weight": "i o -> o i"},
        example=lambda: (Table(), torch.zeros(4, 1, dtype=torch.long)),
    )
    def look_up(ids: Tensor, *, weight: Tensor) -> Tensor:
        return torch.gather(weight, 0, ids.expand(-1, 3))

    ids, options = torch.randint(5, (4, 1)), {"layers": [look_up], "approximations": {"look_up": "kron_reduce"}}
    assert fallback(Table(), ids, name="fc", **options) == ("kron", "its rows are ids, so not 'kron_reduce'")
    net = kfac_fx.compile(Table(), (ids,), loss="categorical", verify=False, **options)
    with pytest.raises(kfac_fx.RegistrationError, match="'kron_reduce' takes the mean of rows"):
        net.record((ids,), {})


# --- with other options ---------------------------------------------------------------------------------------------


def test_it_takes_the_rows_of_all_positions_whatever_is_sampled() -> None:
    model, x, y = Pooled(nn.Conv2d(2, 4, 3)), torch.randn(6, 2, 5, 5), torch.randint(4, (6,))
    whole = estimated(model, (x,), y)
    part = estimated(model, (x,), y, sub_sample_inputs=True, sub_sample_patches=0.1)
    torch.testing.assert_close(
        *(block_of(recorder, "layer").full_fisher_block() for recorder in (whole, part)), rtol=0, atol=0
    )
    assert part.net.report.to_dict()["sampling"] == [
        "conv2d(layer.weight, layer.bias): all rows, 'kron_reduce' needs the rows of all positions"
    ]


def test_asked_for_by_name_its_sides_stay_dense() -> None:
    block = block_of(estimated(Pooled(nn.Linear(3, 4)), (torch.randn(6, 5, 3),), None, dense_limit=2), "layer")
    assert block.registration.blocks == (1, 1) and block.registration.reason is None
    assert {name: tuple(factor.value.shape) for name, factor in block.factors.items() if name != "positions"} == {
        "A": (1, 4, 4),
        "G": (1, 4, 4),
    }


def test_a_loss_at_every_position_counts_positions_as_cases() -> None:
    """c is one row a sequence over as many cases as there are predictions."""
    block = block_of(estimated(nn.Sequential(nn.Linear(3, 4)), (torch.randn(6, 5, 3),), None), "0")
    torch.testing.assert_close(block.factors["positions"].value, torch.tensor(1 / 5))


def test_it_shares_a_stack_with_kron_and_no_numbers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    x, y = torch.randn(6, 5, 3), torch.randint(3, (6, 5))
    mixed = estimated(model, (x,), y, approximations={"0": "kron_reduce"})
    assert block_of(mixed, "0").group is block_of(mixed, "2").group
    for name, asked in (("0", REDUCE), ("2", {})):
        alone = estimated(model, (x,), y, approximations=asked)
        torch.testing.assert_close(*(block_of(estimator, name).full_fisher_block() for estimator in (mixed, alone)))


# --- by hand --------------------------------------------------------------------------------------------------------


def both(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(x @ w) + torch.tanh(x @ v)).sum(1)


def test_a_collection_takes_it_and_its_factors_are_not_those_of_kron() -> None:
    x, y = torch.randn(6, 5, 3), torch.randint(4, (6,))
    lc = collection(both, x, w=(3, 4), v=(3, 4))
    assert type(lc.register_fully_connected("w", "x", "matmul", approx="kron_reduce")).__name__ == (
        "FullyConnectedKFACBasicFB"
    )
    lc.register_fully_connected("v", "x", "matmul_1")
    lc.register_categorical_predictive_distribution("sum_1")
    assert [len(factor.blocks) for factor in lc.get_factors()] == [1, 1, 1, 1]
    by_hand = estimated(lc, (x,), y)
    compiled = estimated(lc.model, (x,), y, approximations={"w": "kron_reduce"})
    for name in ("w", "v"):
        torch.testing.assert_close(*(block_of(net, name).full_fisher_block() for net in (by_hand, compiled)))


def test_towers_add_up_as_cases() -> None:
    def halves(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        half = x.shape[0] // 2
        return torch.tanh(x[:half] @ w).sum(1), torch.tanh(x[half:] @ w).sum(1)

    def whole(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w).sum(1)

    x, y = torch.randn(7, 5, 3), torch.randint(4, (7,))
    found = []
    for function, targets, outputs in ((halves, (y[:3], y[3:]), ("sum_1", "sum_2")), (whole, y, ("sum_1",))):
        lc = collection(function, x, w=(3, 4))
        with torch.no_grad():
            lc.parameters["w"].copy_(torch.linspace(-1, 1, 12).view(3, 4))
        for n, output in enumerate(outputs):
            lc.register_categorical_predictive_distribution(output, name="loss", reuse=n > 0)
        lc.set_default_fully_connected_approximation("kron_reduce")
        lc.auto_register_layers()
        (block,) = estimated(lc, (x,), targets).blocks.values()  # type: ignore[arg-type]
        assert block.registration.towers == len(outputs) and block.registration.approximation == "kron_reduce"
        found.append(block.full_fisher_block())
    torch.testing.assert_close(*found)


def test_a_collection_refuses_it_where_cases_are_merged_with_positions() -> None:
    x = torch.randn(6, 5, 3)
    lc = collection(lambda x, w: (x.reshape(-1, 3) @ w).view(6, 5, 4).sum(1), x, w=(3, 4))
    with pytest.raises(kfac_fx.ApproximationError, match="the cases are merged with positions there"):
        lc.register_fully_connected("w", None, "matmul", approx="kron_reduce")
