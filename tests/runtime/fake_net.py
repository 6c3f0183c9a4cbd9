"""A net whose statistics are recorded by plain autograd, and its Fisher written out densely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.passes.ir import Registration, Use
from kfac_fx.passes.matrix import Layout, MatrixForm
from kfac_fx.recording.statistics import Moments, sum_of

ONE_USE = (cast(Use, None),)
EXACT: dict[str, Any] = {"mode": "exact", "targets": None, "fraction": 1.0, "generator": None}


class Scale(nn.Module):
    """x * scale + shift"""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(features)), nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Mean(nn.Module):
    """Over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def matrix_of(name: str, layer: nn.Module) -> MatrixForm:
    if isinstance(layer, nn.Linear):
        o, i = layer.weight.shape
        bias = None if layer.bias is None else (f"{name}.bias", Layout((o,)).reshape((1, o)))
        return MatrixForm((f"{name}.weight", Layout((o, i)).reshape((1, o, i))), bias)
    assert isinstance(layer, Scale)
    (g,) = layer.scale.shape
    return MatrixForm(
        (f"{name}.scale", Layout((g,)).reshape((g, 1, 1))), (f"{name}.shift", Layout((g,)).reshape((g, 1)))
    )


def as_rows(tensor: Tensor, form: MatrixForm) -> Tensor:
    """[N, (S,) d] -> [N, S, d], or [N, S, d, 1] for a matrix of groups."""
    rows = tensor if tensor.dim() == 3 else tensor.unsqueeze(1)
    return rows if form.shape[0] == 1 else rows.unsqueeze(-1)


@dataclass(eq=False)
class FakeNet:
    """A sequence of layers under a loss, in float64.

    approximations: of the layers by name; "generic" and "generic full" for parameters that no layer claims.
    fisher_root: B of one case's outputs, with B Bᵀ the Fisher of the loss: "squared error" (σ² = 1) or "categorical".
    """

    model: nn.Sequential
    approximations: dict[str, str]
    loss: str = "squared error"

    def __post_init__(self) -> None:
        self.model.double()
        made = []
        for name, approximation in self.approximations.items():
            layer = self.model.get_submodule(name)
            parameters = tuple(f"{name}.{p}" for p, _ in layer.named_parameters())
            form = None if approximation.startswith("generic") else matrix_of(name, layer)
            chosen = {"generic": "diagonal", "generic full": "full"}.get(approximation, approximation)
            made.append(Registration(type(layer).__name__.lower(), form, parameters, ONE_USE, chosen))
        self.registrations = tuple(made)

    def named_parameters(self) -> Any:
        return self.model.named_parameters()

    def run(self, x: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The output, and the input and output of each registered layer."""
        seen = {}
        for name, layer in self.model.named_children():
            y = layer(x)
            seen[name] = (x, y)
            x = y
        return x, {name: seen[name] for name in self.approximations}

    def roots(self, outputs: Tensor) -> Tensor:
        """B of every case: [N, outputs, k]."""
        if self.loss == "squared error":
            return torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device).expand(len(outputs), -1, -1)
        p = outputs.softmax(-1)
        return torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)

    def cotangents(self, outputs: Tensor, mode: str, targets: Any, generator: torch.Generator | None) -> list[Tensor]:
        outputs = outputs.detach()
        if mode == "exact":
            return list(self.roots(outputs).unbind(-1))
        if mode == "empirical":
            return [outputs - targets]
        noise = torch.randn(
            outputs.shape[0], self.roots(outputs).shape[-1], 1, dtype=outputs.dtype, generator=generator
        )
        return [(self.roots(outputs) @ noise).squeeze(-1)]

    def record(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        mode: str = "gradients",
        targets: Any = None,
        fraction: float = 1.0,
        generator: torch.Generator | None = None,
        only: Any = None,
    ) -> Moments:
        """`exact`: one cotangent for every column of B, whose second moments add up."""
        (x,) = args
        x = x[: max(1, int(fraction * len(x)))]
        outputs, layers = self.run(x)
        found: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for cotangent in self.cotangents(outputs, mode, targets, generator):
            taps = [y for _, y in layers.values()]
            grads = torch.autograd.grad(outputs, [*taps, *self.model.parameters()], cotangent, retain_graph=True)
            by_name = dict(zip(dict(self.model.named_parameters()), grads[len(taps) :], strict=True))
            for registration, (rows, _), d in zip(self.registrations, layers.values(), grads, strict=False):
                if registration.matrix is None:
                    sums = {"gradient": torch.cat([by_name[name].flatten() for name in registration.parameters])[None]}
                else:
                    form, bias = registration.matrix, registration.matrix.bias is not None
                    arguments = as_rows(rows.detach(), form), as_rows(d, form), bias, form.shape
                    sums = {s.name: sum_of(s.name, *arguments) for s in registration.statistics}
                found[registration.parameters] = (
                    joined(found[registration.parameters], sums) if registration.parameters in found else sums
                )
        return Moments({key: sums for key, sums in found.items() if only is None or key[0] in only}, len(x))

    def fisher(self, x: Tensor) -> dict[tuple[str, ...], Tensor]:
        """The blocks of (1/N) Σ_n J_nᵀ B_n B_nᵀ J_n, in the order of the flattened matrices."""
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}

        def one(parameters: dict[str, Tensor], case: Tensor) -> Tensor:
            return cast(Tensor, functional_call(self.model, parameters, (case[None],)))[0]

        per_case = cast(Callable[..., dict[str, Tensor]], vmap(jacrev(one), (None, 0)))(parameters, x)
        b = self.roots(self.model(x).detach())
        blocks = {}
        for registration in self.registrations:
            shaped = {name: per_case[name] for name in registration.parameters}
            j = vmap(vmap(lambda p, form=registration.matrix: form.pack(p).flatten()))(shaped)  # [N, outputs, p]
            root = j.mT @ b
            blocks[registration.parameters] = (root @ root.mT).mean(0)
        return blocks


def joined(before: dict[str, Tensor], sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Over cotangents: what is quadratic in gradients adds up, what is linear is listed, inputs are counted once."""
    result = {}
    for name, value in sums.items():
        if name == "per_case":
            result[name] = torch.cat([before[name].view(-1, *value.shape), value[None]])
        elif name == "gradient":
            result[name] = torch.cat([before[name], value])
        else:
            result[name] = before[name] if name in ("count", "A", "A_diag") else before[name] + value
    return result


# --- nets and estimators --------------------------------------------------------------------------------------------


def deep(approximation: str = "kron") -> FakeNet:
    """Two layers of equal shape and two others, one of them diagonal."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    return FakeNet(model, {"0": approximation, "2": approximation, "4": approximation, "5": "diagonal"})


def mixed() -> FakeNet:
    model = nn.Sequential(nn.Linear(3, 4), Scale(4), nn.Tanh(), nn.Linear(4, 2, bias=False), nn.Linear(2, 2))
    return FakeNet(model, {"0": "kron_in_diag", "1": "full", "3": "kron", "4": "generic full"})


def exact(net: FakeNet, x: Tensor, **options: Any) -> FisherEstimator:
    """After one batch in which the Fisher of the outputs was enumerated instead of sampled."""
    est = FisherEstimator(net, **options)
    est.accumulate(net.record((x,), {}, mode="exact"))
    est.fold()
    return est


def batch(n: int = 6) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64)


def noise(est: FisherEstimator) -> dict[str, Tensor]:
    parameters = dict(est.net.named_parameters())
    return {name: torch.randn_like(parameters[name]).detach() for name in est.parameters}
