"""Low-rank adapters of stacked expert weights: every expert is a group of a block, as without adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.layers.linear import grouped_mm

CASES, EXPERTS, OUT, IN, RANK = 7, 3, 5, 4, 2
Weight = Callable[[Tensor, Tensor, Tensor], Tensor]  # of the frozen weight and of the two factors
Layer = Callable[[Tensor, Tensor], Tensor]


def routed(x: Tensor, weight: Tensor) -> Tensor:
    """Two cases go to the first expert, none to the second, and the rest to the third."""
    product: Tensor = grouped_mm(x, weight.mT, torch.tensor([2, 2, CASES]))
    return product


def in_autocast(weight: Tensor, b: Tensor, a: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.baddbmm(weight, b, a, alpha=0.5)


WEIGHTS: dict[str, Weight] = {
    "einsum": lambda w, b, a: w + torch.einsum("eor,eri->eoi", b, a),
    "einsum, factors swapped": lambda w, b, a: w + torch.einsum("eri,eor->eoi", a, b),
    "einsum, transposed": lambda w, b, a: (w.mT + torch.einsum("eor,eri->eio", b, a)).mT,
    "matmul": lambda w, b, a: w + 0.5 * (b @ a),
    "bmm, turned": lambda w, b, a: torch.bmm(a.mT, b.mT).transpose(1, 2) - w,
    "baddbmm": lambda w, b, a: torch.baddbmm(w, b, a, alpha=0.5),
    "autocast off": in_autocast,
}
LAYERS: dict[str, Layer] = {
    "every expert": lambda x, w: torch.einsum("ni,eoi->neo", x, w),
    "inputs of their own": lambda x, w: torch.einsum("nei,eoi->neo", x.unsqueeze(1).expand(-1, EXPERTS, -1), w),
    "summed": lambda x, w: torch.einsum("nei,eoi->no", x.unsqueeze(1).expand(-1, EXPERTS, -1), w),
    "weight transposed": lambda x, w: torch.einsum("ni,eio->neo", x, w.mT),
    "matmul": lambda x, w: x @ w.mT,
    "routed": routed,
}


class Adapted(nn.Module):
    def __init__(self, weight: Weight, layer: Layer) -> None:
        super().__init__()
        self.register_buffer("frozen", torch.randn(EXPERTS, OUT, IN))
        self.b = nn.Parameter(torch.randn(EXPERTS, OUT, RANK))
        self.a = nn.Parameter(torch.randn(EXPERTS, RANK, IN))
        self.weight, self.layer = weight, layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x, self.weight(self.get_buffer("frozen"), self.b, self.a))
        return y.transpose(0, 1) if y.dim() == 3 and y.shape[0] == EXPERTS else y


def blocks(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """The matrices and factors of every parameter; the proof of compile has held the rows against autograd."""
    torch.manual_seed(1)
    net = kfac_fx.compile(model, (x,), loss="normal", strict=True)
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="empirical")
    targets = torch.zeros_like(model(x))
    estimator.update_covariances(x, targets=targets)
    return {key[0]: {n: f.value for n, f in block.factors.items()} for key, block in estimator.blocks.items()}


@pytest.mark.parametrize(("weight", "layer"), [
    *((weight, "every expert") for weight in WEIGHTS), *(("einsum", layer) for layer in LAYERS), ("baddbmm", "routed"),
])  # fmt: skip
def test_every_expert_has_a_kronecker_block_of_its_own(weight: str, layer: str) -> None:
    """Its factors are those of the same adapters as plain layers of every expert."""
    torch.manual_seed(0)
    model, x = Adapted(WEIGHTS[weight], LAYERS[layer]), torch.randn(CASES, IN)
    found = blocks(model, x)
    assert {name: {k: list(v.shape) for k, v in factors.items() if k in "AG"} for name, factors in found.items()} == {
        "b": {"A": [EXPERTS, RANK, RANK], "G": [EXPERTS, OUT, OUT]},
        "a": {"A": [EXPERTS, IN, IN], "G": [EXPERTS, RANK, RANK]},
    }
    # By hand: the gradient rows of W are those of its outputs, the rows are x; a has Bᵀ d and x, and b has d and A x.
    effective = model.weight(model.get_buffer("frozen"), model.b, model.a).detach().requires_grad_()
    y = model.layer(x, effective)
    cases = [slice(None)] * EXPERTS if layer != "routed" else [slice(0, 2), slice(2, 2), slice(2, CASES)]
    (at_output,) = torch.autograd.grad(kfac_fx.losses.Normal(y, targets=torch.zeros_like(y)).evaluate(), [y])
    scale = 0.5 if weight in ("matmul", "baddbmm", "autocast off") else 1.0
    for expert in range(EXPERTS):
        if layer in ("summed", "routed"):
            d = at_output[cases[expert]]
        else:
            d = at_output[expert] if at_output.shape[0] == EXPERTS else at_output[:, expert]
        rows, b, a = x[cases[expert]], model.b[expert].detach(), model.a[expert].detach()
        moments = {
            "a": (rows.T @ rows, scale**2 * (d @ b).T @ (d @ b)),
            "b": ((rows @ a.T).T @ (rows @ a.T), scale**2 * d.T @ d),
        }
        for name, (of_rows, of_gradients) in moments.items():  # A is a mean over the rows of the expert
            torch.testing.assert_close(found[name]["A"][expert], of_rows / max(len(rows), 1))
            torch.testing.assert_close(found[name]["G"][expert], of_gradients / CASES, rtol=1e-4, atol=1e-5)


def test_adapters_as_peft_lays_them_out() -> None:
    """Two matrices [rank · experts, in] and [out, rank · experts] for a whole stack, as of `target_parameters`."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frozen", torch.randn(EXPERTS, OUT, IN))
            self.a, self.b = nn.Linear(IN, RANK * EXPERTS, bias=False), nn.Linear(RANK * EXPERTS, OUT, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            a = self.a.weight.reshape(EXPERTS, -1, IN)
            b = self.b.weight.reshape(OUT, -1, EXPERTS).permute(2, 0, 1)
            with torch.autocast("cpu", enabled=False):
                weight = torch.baddbmm(self.get_buffer("frozen"), b, a, alpha=2.0)
            return routed(x, weight)

    net = kfac_fx.compile(Model(), (torch.randn(CASES, IN),), loss="normal", strict=True)
    shapes = {r.parameters[0]: None if r.matrix is None else r.matrix.shape for r in net.registrations}
    assert shapes == {"a.weight": (EXPERTS, RANK, IN), "b.weight": (EXPERTS, OUT, RANK)}


def test_a_factor_of_a_stack_that_is_also_one_matrix_is_generic_with_a_reason() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (
                nn.Parameter(torch.randn(EXPERTS * RANK, IN)),
                nn.Parameter(torch.randn(EXPERTS, OUT, RANK)),
            )

        def forward(self, x: Tensor) -> Tensor:
            stacked = torch.einsum("ni,eoi->neo", x, self.b @ self.a.view(EXPERTS, RANK, IN))
            return torch.cat([stacked.flatten(1), x @ self.a.T], 1)

    net = kfac_fx.compile(Model(), (torch.randn(CASES, IN),), loss="normal")
    generic = {r.parameters[0] for r in net.registrations if r.generic}
    assert generic == {"a"} and "a factor of its weight has a use of another form" in " ".join(str(net.report).split())
