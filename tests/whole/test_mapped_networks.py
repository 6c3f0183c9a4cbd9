"""Networks under torch.func.vmap, in forward: their statistics are those of the same network on a whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import kfac_fx
from kfac_fx import UntraceableError
from kfac_fx.passes.trace import maps_parameters
from kfac_fx.recording.captures import Capturing
from tests.tables import pairs

pytestmark = pytest.mark.usefixtures("float64")
N = 6


class Mapped(nn.Module):
    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.call = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.net, x)


CALLS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], Callable[[nn.Module, Tensor], Tensor]]] = {
    "over the cases": (lambda net, x: vmap(net)(x), lambda net, x: net(x)),
    "behind an operation": (lambda net, x: vmap(lambda row: net(row).tanh())(2 * x), lambda net, x: net(2 * x).tanh()),
    "twice": (lambda net, x: vmap(net)(x) * vmap(net)(x + 1), lambda net, x: net(x) * net(x + 1)),
}
MODES = {"True-exact": (True, "exact"), "False-gradients": (False, "gradients")}


@pairs(("verify, mode", MODES), ("mapped, plain", CALLS))
def test_a_network_mapped_over_the_cases_has_the_statistics_of_the_batch(
    mapped: Callable[[nn.Module, Tensor], Tensor],
    plain: Callable[[nn.Module, Tensor], Tensor],
    verify: bool,
    mode: str,
) -> None:
    x, model, other = torch.randn(N, 3), Mapped(mapped), Mapped(plain)
    other.load_state_dict(model.state_dict())
    factors = []
    for kind in (model, other):
        estimator = kfac_fx.FisherEstimator(
            kfac_fx.compile(kind, (x,), loss="normal", strict=True, verify=verify), estimation_mode=mode, seed=0
        )
        for batch in (x, x[:4]):
            estimator.update_covariances(batch)
        factors.append({key: block.factors for key, block in estimator.blocks.items()})
    assert factors[0].keys() == factors[1].keys() == {("net.0.weight", "net.0.bias"), ("net.2.weight", "net.2.bias")}
    for key, of_block in factors[0].items():
        for name, factor in of_block.items():
            assert factor.value.any()
            torch.testing.assert_close(factor.value, factors[1][key][name].value)


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stacked, _ = stack_module_state([nn.Linear(3, 2) for _ in range(4)])
        self.weight, self.bias = (nn.Parameter(stacked[name].detach()) for name in ("weight", "bias"))
        self.member = [nn.Linear(3, 2, device="meta")]

    def forward(self, x: Tensor) -> Tensor:
        def member(weight: Tensor, bias: Tensor) -> Any:
            return functional_call(self.member[0], {"weight": weight, "bias": bias}, (x,))

        return vmap(member)(self.weight, self.bias).tanh().mean(0)


def test_members_of_a_mapped_ensemble_are_groups_of_one_block() -> None:
    model, x = Ensemble(), torch.randn(N, 3)
    net = kfac_fx.compile(model, (x,), loss="normal", strict=True)
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(x)
    factors, rows = estimator.blocks["weight", "bias"].factors, torch.cat([x, torch.ones(N, 1)], dim=1)
    torch.testing.assert_close(factors["A"].value, (rows.mT @ rows / N).expand(4, 4, 4))
    slopes = 1 - (torch.einsum("ni,koi->kno", x, model.weight) + model.bias.unsqueeze(1)).tanh().square()
    torch.testing.assert_close(factors["G"].value, (2 * (slopes / 4).square().mean(1)).diag_embed().detach())


def test_other_regions_of_vmap_stay_in_the_graph_of_torch_export() -> None:
    """A mask that is mapped over positions needs no capture for every size."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            mask = vmap(lambda row: (row > 0).double())(x)
            logits: Tensor = self.layer(x * mask)
            return logits

    program = kfac_fx.compile(Masked(), (torch.randn(N, 3),), loss="normal").program
    assert program.cases is not None and not maps_parameters(torch.fx.GraphModule(program.root, program.graph))


def test_a_graph_whose_outputs_have_no_gradient_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mapped(lambda net, x: net(x))
    net = kfac_fx.compile(model, (torch.randn(N, 3),), loss="normal", verify=False)
    recorder = net.recorder((torch.randn(N, 3),), {})
    run = type(recorder.emitted).run

    def detached(*args: Any, **options: Any) -> Any:
        outputs, of_fisher = run(*args, **options)
        return outputs, tuple(tensor.detach() for tensor in of_fisher)

    monkeypatch.setattr(type(recorder.emitted), "run", detached)
    verified = Capturing(model, replace(net.captures.arguments, verify=True))
    with pytest.raises(UntraceableError, match="the graph of Mapped has uses of parameters, and its outputs"):
        verified.proved(recorder, (torch.randn(N, 3),), {})
